"""The smallest thing that still shows a mistake, written as a test that runs by itself."""

"""Tools for the tests of other projects: tiny models, and the conformance tests of back-ends."""

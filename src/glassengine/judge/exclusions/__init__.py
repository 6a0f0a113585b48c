"""What is left out of a judgement because every right implementation may have something else there."""

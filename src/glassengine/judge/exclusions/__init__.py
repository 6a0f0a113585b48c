"""Elements that are left out of a judgement, because every right implementation may have something else there."""

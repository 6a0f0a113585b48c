"""What is known of each ATen op by itself: one row per op, and what its schema says of its arguments."""

"""Traits of each ATen op: one row per op, and the arguments of its schema."""

"""Pairs the ops of two programs by the values that they compute."""

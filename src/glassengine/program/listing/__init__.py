"""Stages of a program as text, and what differs between two of them."""

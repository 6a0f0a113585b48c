"""Functional graphs by rewriting: the rules, op by op."""

"""What other projects can test with: tiny models and what a back-end must do."""

"""Parts of the package that the rest works without. They are reached by `extensions`, and nothing else imports them."""

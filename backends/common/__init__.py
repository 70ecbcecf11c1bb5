"""Parts that several engines share."""

"""What clients speak. Each dialect translates to and from the server's own form, and knows nothing of the others."""

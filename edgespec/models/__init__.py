"""Models on disk: by name, and what their files hold."""

"""An HTTP server for one loaded model, with OpenAI's and Anthropic's dialects and a page."""

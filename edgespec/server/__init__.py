"""One loaded model for every program on the machine, over HTTP: the dialects of OpenAI and Anthropic, and a page."""

"""OpenAI's routes, and what vLLM adds to them."""

"""OpenAI's routes, with vLLM's additions."""

"""The server: one queue of requests, and the interfaces to it (OpenAI's images, AUTOMATIC1111's API, a page)."""

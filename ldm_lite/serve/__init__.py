"""The server: one queue of requests, and the interfaces to it (OpenAI's images, AUTOMATIC1111's API, a page).

A POST arrives at the socket of server.py, passes the guard of app.py, is read by http.py, becomes the options of
a task in openai.py or a1111/, and waits in queue.py, whose thread denoises it; http.py encodes the PNG.
"""

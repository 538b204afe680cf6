"""The engine behind HTTP, in the protocol of OpenAI's completions and chat.

app.py       the routes and the limits of what is accepted
protocol.py  from a body of JSON to requests of the engine, and the answers
text.py      from text to tokens and back, chat templates, stop strings
worker.py    the thread that runs the engine, its queue and its end
metrics.py   counters for Prometheus
server.py    uvicorn: `toolkit serve`
"""

"""Serving: an engine that batches requests as they come, and what it is asked.

Engine                  continuous batching of any looped model
Request                 a prompt and how to continue it
Progress                what became of it, with times
Written                 a token as the engine hands it out
Scheduler               first come, first served, prompts in chunks beside the rows that write
Iteration, Job          what a scheduler plans, and what it is given
PageTable               who refers to which page of the cache; prefixes that stay
Lease                   the pages of a request
Work                    what an iteration computes, as costs depend on it
replay                  a trace through the engine, by the wall's clock or a formula's
Run, Turn               its result
TracedRequest           a request of a trace: arrival, prompt, output
requests_of             requests with random prompts of a trace's lengths
"""

from toolkit.serving.engine import Engine, Work, Written
from toolkit.serving.prefixes import Lease, PageTable
from toolkit.serving.replay import Run, Turn, replay
from toolkit.serving.requests import Progress, Request, TracedRequest, requests_of
from toolkit.serving.scheduler import Iteration, Job, Scheduler

__all__ = [
    "Engine",
    "Iteration",
    "Job",
    "Lease",
    "PageTable",
    "Progress",
    "Request",
    "Run",
    "Scheduler",
    "TracedRequest",
    "Turn",
    "Work",
    "Written",
    "replay",
    "requests_of",
]

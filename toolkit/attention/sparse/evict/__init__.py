"""Systems that choose tokens before the query is known, as caches that evict do."""

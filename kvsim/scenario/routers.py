"""The routers that a scenario can name."""

from __future__ import annotations

from policies.registry import Registry

ROUTERS = Registry(
    "router",
    "kvsim.routers",
    "ROUTERS",
    {
        "round-robin": "one server after the other",
        "random": "any server",
        "least-load": "the server with the fewest requests in flight",
        "power-of-two": "two servers are drawn, and the one with fewer requests in flight is taken",
        "least-tokens": "the server whose requests in flight have the fewest prompt tokens",
        "consistent-hash": "vllm-router 0.1.17: the server that the hash of a session belongs to",
        "prefix-hash": "smg 1.13.0: the server that the hash of a prompt's first 256 tokens belongs to",
        "sticky-least-loaded": "vllm-router 0.1.17: the server that has a session; for a new one, that with the fewest",
        "vllm-router/cache_aware": "vllm-router 0.1.17: where a prompt's beginning went before, or the least loaded",
        "sglang-router/cache_aware": "sglang-router 0.3.2: where a prompt's beginning went before, or the least loaded",
        "smg/cache_aware": "smg 1.13.0: the least expected wait where a prompt's beginning went before, or anywhere",
        "smg/least_load": "smg 1.13.0: the least expected wait, by what servers report every 10 s",
        "vllm/data-parallel": "vLLM's own: requests waiting and running, by what engines report every 100 ms",
        "production-stack/prefix-aware": "vLLM's production-stack: share of the prompt sent there, less relative load",
        "llm-d": "llm-d's default scorers: queue, free cache, and share of the prompt sent there",
        "clairvoyant": "a bound: the server that would compute the prompt first, by what the caches really hold",
    },
)
"""The names that ``cluster.router`` accepts. What others add is called like
``kvsim.simulation.cluster.routers.base.Router``: with the number of servers and a generator of NumPy."""

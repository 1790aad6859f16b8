"""Records what vLLM's scheduler decides where tokens are drafted, without a GPU: run by the Python that has vLLM.

    python record_drafts.py MODEL OUT.jsonl.gz [NAME=VALUE ...]

``Scheduler`` and ``KVCacheManager`` are the real ones; what runs the model, and what drafts, is played: how many
drafted tokens are accepted is drawn, and for n-grams how many are drafted. The fields are those of recordings of the
scheduler, and besides:

- ``drafts`` ``[request, drafted tokens that this step checks, how many of them are accepted]``
- ``next`` ``[request, tokens drafted behind this step]``, except where steps are composed ahead: there it is always as
  many as are asked for

Blocks have the ids of the recordings instead of SHA-256 sums.
"""

import torch
from played_engine import SETTINGS as COMMON
from played_engine import Playing, cache_of, config_of, main, model_of, scheduler_of
from vllm.config import ParallelConfig, SpeculativeConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds

SETTINGS = COMMON | {"window": 0, "method": "ngram", "tokens": 3, "acceptance": 0.6, "found": 0.8}
"""``method``: as of a scenario; ``found``: share of the steps in which n-grams find something; ``window``: 0 for full
attention."""
METHODS = {"ngram": "ngram", "draft-model": "draft_model", "eagle": "eagle", "mtp": "mtp"}


def speculation_of(target, given):
    """vLLM's settings of drafts; which method it is, ``as_asked`` says later."""
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=given["tokens"],
        target_model_config=target,
        target_parallel_config=ParallelConfig(),
    )


def as_asked(config, given):
    """The settings with the method: only now, since a drafter would be looked for in files."""
    config.speculative_config.method = METHODS[given["method"]]
    return config


def drafting(model, given):
    """The real scheduler."""
    size, target = given["block_size"], model_of(model, given)
    shape = {"block_size": size, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float16}
    spec = SlidingWindowSpec(**shape, sliding_window=given["window"]) if given["window"] else FullAttentionSpec(**shape)
    config = as_asked(config_of(target, given, size, speculative_config=speculation_of(target, given)), given)
    return scheduler_of(config, given, cache_of(spec, given["num_blocks"]), size)


class Drafting(Playing):
    """Plays the drafter too, where there is one."""

    next = ()
    """What was drafted behind the step that ended last."""

    def header(self):
        """Every setting, with the drafter's."""
        about = super().header()
        if self.given["method"]:
            about["speculation"] = {key: self.given[key] for key in ("method", "tokens")}
            about["effective"]["lookahead"] = self.scheduler.num_lookahead_tokens
            if ahead := getattr(self.scheduler, "num_hash_lookahead_tokens", 0):
                about["effective"]["key_lookahead"] = ahead
        return about

    def composed(self, output, emit):
        """The drafts that are checked; how many of each request are accepted."""
        drafts = output.scheduled_spec_decode_tokens
        # Drafts of a request that had no step before say nothing.
        begun = {each.req_id for each in output.scheduled_new_reqs} | set(output.scheduled_cached_reqs.resumed_req_ids)
        accepted = {name: 0 if name in begun else self._accepted(len(drafts.get(name, ()))) for name in emit}
        self.next = []
        checked = [[name, len(drafts[name]), accepted[name]] for name in emit if drafts.get(name)]
        return ({"drafts": checked} if self.given["method"] else {}), accepted

    def told(self):
        """What was drafted behind the step."""
        return {"next": self.next} if self.given["method"] and self.given["depth"] == 1 else {}

    def _accepted(self, drafted):
        accepted = 0
        while accepted < drafted and self.draw.random() < self.given["acceptance"]:
            accepted += 1
        return accepted

    def _drafted(self):
        given = self.given
        if given["method"] != "ngram":
            return given["tokens"]
        return self.draw.randrange(1, given["tokens"] + 1) if self.draw.random() < given["found"] else 0

    def sampled(self, name, accepted):
        """What was accepted of the drafts, and one more."""
        return 1 + accepted[name]

    def learn(self):
        """Tell the scheduler too what is drafted behind the step."""
        names, accepted = super().learn()
        if self.given["method"] and self.given["depth"] == 1 and names:
            drafted = {name: self._drafted() for name in names}
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafted), [[7] * n for n in drafted.values()]))
            self.next = [[name, n] for name, n in drafted.items() if name in accepted]


class Recording(Drafting):
    """Writes down what is drafted."""

    def __init__(self, model, given):
        super().__init__(given, drafting(model, given), given["block_size"])

    def header(self):
        """Every setting."""
        return super().header() | ({"window": self.given["window"]} if self.given["window"] else {})


if __name__ == "__main__":
    main(Recording, SETTINGS)

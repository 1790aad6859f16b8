"""Records what vLLM's scheduler decides over several cache groups, without a GPU: run by the Python that has vLLM.

    python record_groups.py MODEL OUT.jsonl.gz [NAME=VALUE ...]

``Scheduler``, ``KVCacheManager`` and its coordinators are the real ones; what runs the model is played. The model,
which ``model.py`` writes, is only looked at for its shape. The groups are given, as ``full:16,window:16:48``; each has
a kind, the tokens of a block, those of its window or chunk, or the grid of a state's checkpoints.

The fields are those of recordings of the scheduler. Where these have one list of blocks, there is one for each group; a
group's number follows the ids of its blocks. Of a block with several ids, the first counts.
"""

import math

import torch
from played_engine import SETTINGS as COMMON
from played_engine import config_of, crc, main, model_of, scheduler_of
from record_drafts import Drafting, as_asked, speculation_of
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

SETTINGS = COMMON | {
    "groups": "full:16,window:16:48",
    "num_blocks": 64,
    "retention": 0,
    "chunked": 1,
    "long_thr": 0,
    "reserve_full": 1,
    "policy": "fcfs",
    "watermark": 0.0,
    "method": "",
    "tokens": 3,
    "acceptance": 0.6,
    "found": 0.8,
}
"""``method``: what drafts, as in ``record_drafts.py``, or nothing. ``retention``: tokens between the states and windows
that stay cached, 0: none but the ends of prompts, -1: all."""


def group_of(text):
    """A cache group by the words of ``groups``: as the header has it."""
    kind, size, *rest = text.split(":")
    group = {"kind": kind, "block_size": int(size)}
    if kind in ("window", "chunked"):
        group["span"] = int(rest[0])
    if kind == "state":
        group["checkpoint_grid"] = int(rest[0]) if rest else 0
    return group


def spec_of(group, given):
    """vLLM's own description of a cache group. How many bytes its blocks have is of no account to a scheduler.

    Without a prefix cache vLLM keeps one state for each sequence, in a block for as many tokens as one can have.
    """
    kind, size = group["kind"], group["block_size"]
    heads = {"block_size": size, "num_kv_heads": 4, "head_size": 64, "dtype": torch.float16}
    if kind == "full":
        return FullAttentionSpec(**heads)
    if kind == "latent":
        return MLAAttentionSpec(**heads | {"num_kv_heads": 1, "head_size": 576})
    if kind == "window":
        return SlidingWindowSpec(**heads, sliding_window=group["span"])
    if kind == "chunked":
        return ChunkedLocalAttentionSpec(**heads, attention_chunk_size=group["span"])
    return MambaSpec(
        block_size=size if given["caching"] else given["max_model_len"],
        shapes=((16, 16),),
        dtypes=(torch.float16,),
        mamba_cache_mode="align" if given["caching"] else "none",
        num_speculative_blocks=given["tokens"] if given["method"] else 0,
        num_prefill_checkpoint_blocks=int(group["checkpoint_grid"] > 0),
        prefill_checkpoint_alignment=group["checkpoint_grid"] or None,
    )


def grouped(model, given, groups):
    """The real scheduler, and the tokens of which a block has an id."""
    caching = bool(given["caching"])
    specs = [KVCacheGroupSpec([f"layer {i}"], spec_of(group, given)) for i, group in enumerate(groups)]
    sizes = [spec.kv_cache_spec.block_size for spec in specs]
    size = math.lcm(*sizes)  # As resolve_kv_cache_block_sizes has it.
    hashed = math.gcd(*sizes) if caching else size
    states = [group["block_size"] for group in groups if group["kind"] == "state"]
    scheduling = {
        "enable_chunked_prefill": bool(given["chunked"]),
        "long_prefill_token_threshold": given["long_thr"],
        "policy": given["policy"],
        "scheduler_reserve_full_isl": bool(given["reserve_full"]),
        "watermark": given["watermark"],
    }
    target = model_of(model, given)
    drafts = {"speculative_config": speculation_of(target, given)} if given["method"] else {}
    config = config_of(target, given, sizes[0], scheduling, **drafts)
    if drafts:
        config = as_asked(config, given)
    config.scheduler_config.enable_chunked_prefill = bool(given["chunked"])
    if states and caching:
        config.cache_config.mamba_cache_mode, config.cache_config.block_size = "align", states[0]
    cache = KVCacheConfig(given["num_blocks"], [], specs, prefix_cache_retention_interval=_retention(given))
    return scheduler_of(config, given, cache, size, hash_block_size=hashed), hashed


class Recording(Drafting):
    """Writes down each call for blocks too."""

    may_repeat = True
    header_names = (
        *(name for name in Drafting.header_names if name != "block_size"),
        "policy",
        "long_thr",
        "watermark",
    )

    def __init__(self, model, given):
        self.groups = [group_of(text) for text in given["groups"].split(",")]
        super().__init__(given, *grouped(model, given, self.groups))
        self.longest = given["max_model_len"] - given["max_out"] - 1
        self.calls = []
        """What the real ones have decided since the last step: see the field ``calls``."""
        self._listen()

    def name_of(self, key):
        """With the number of the block's cache group."""
        return f"{super().name_of(key)}:{int.from_bytes(key[-4:], 'big')}"

    def header(self):
        """Every setting."""
        about, scheduler = super().header(), self.scheduler
        about["effective"] |= {
            "max_in_flight": scheduler.vllm_config.max_in_flight_tokens,
            "chunked": scheduler.scheduler_config.enable_chunked_prefill,
        }
        about |= {"chunked": bool(self.given["chunked"]), "groups": self.groups}
        return about | {"retention": _retention(self.given), "hashed": self.hashed}

    def _listen(self):
        """Have the real ones tell what they decide."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        look_up, allocate, preempt = manager.get_computed_blocks, manager.allocate_slots, scheduler._preempt_request
        free = scheduler._free_request

        def tell_found(request, *rest):
            found = look_up(request, *rest)
            self.calls.append(["L", request.request_id, found[1], ids_of(found[0])])
            return found

        def tell_allocated(request, new, num_new_computed_tokens=0, *rest, **options):
            given = allocate(request, new, num_new_computed_tokens, *rest, **options)
            computed = request.num_computed_tokens
            out = None if given is None else ids_of(given)
            self.calls.append(["A", request.request_id, computed, new, num_new_computed_tokens, out])
            return given

        def tell_preempted(request, *rest, **options):
            self.calls.append(["P", request.request_id])
            return preempt(request, *rest, **options)

        def tell_freed(request, *rest, **options):
            self.calls.append(["F", request.request_id])
            return free(request, *rest, **options)

        manager.get_computed_blocks, manager.allocate_slots = tell_found, tell_allocated
        scheduler._preempt_request, scheduler._free_request = tell_preempted, tell_freed

    def goes_on(self, record):
        """Until no request gets further: some may wait for ever."""
        return bool(record["nst"] or self.in_flight)

    def table(self, name, i):
        """The blocks in each group; of most steps their sum."""
        table = list(map(list, self.scheduler.kv_cache_manager.get_block_ids(name)))
        return table if i % 8 == 0 else crc(table)

    def told(self):
        """The calls for blocks."""
        calls, self.calls = self.calls, []
        return super().told() | {"calls": calls}

    def state(self, ended):
        """Of a block with several ids, one counts."""
        blocks = self.scheduler.kv_cache_manager.block_pool.blocks
        return super().state(ended) | {"nc": len({block.block_hash for block in blocks} - {None})}

    def asked(self):
        """Of a drawn priority, where that counts."""
        answer, _ = super().asked()
        return answer, self.draw.randrange(3) if self.given["policy"] == "priority" else 0


def ids_of(blocks):
    return [[block.block_id for block in group] for group in blocks.blocks]


def _retention(given):
    return None if given["retention"] < 0 else given["retention"]


if __name__ == "__main__":
    main(Recording, SETTINGS)

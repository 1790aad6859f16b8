"""Records what vLLM's scheduler and its NIXL connector decide, without a GPU: run by the Python that has vLLM.

    python record_apart.py MODEL OUT.jsonl.gz [NAME=VALUE ...]

``Scheduler``, ``KVCacheManager`` and ``NixlPullConnectorScheduler`` are the real ones; what runs the model and reads
is played: each read takes a drawn number of steps. One server has requests of three kinds: those that it prefills for
others (``prefill``), those that others have prefilled (``decode``), and its own. The fields are those of recordings of
the scheduler, and besides:

- ``add`` has the kind of each request behind its other fields
- ``look`` ``[request, tokens found in blocks, tokens that are to be read behind them]``
- ``reads`` ``[request, blocks that are read into]``, in order · ``hold`` requests whose blocks are held from now on
- ``done``, ``sent`` requests of which the scheduler learns behind this step that they have been read, here or by others

Blocks have the ids of the recordings instead of SHA-256 sums.
"""

from played_engine import SETTINGS as COMMON
from played_engine import Playing, main
from record_offload import connected
from vllm.v1.outputs import KVConnectorOutput

SETTINGS = COMMON | {"steps": 200, "slowest": 8}
"""``slowest``: the most steps that a read takes."""
KINDS = {
    "prefill": {"do_remote_decode": True, "do_remote_prefill": False},
    "decode": {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "other",
        "remote_request_id": "other",
        "remote_host": "other",
        "remote_port": 1,
        "tp_size": 1,
    },
    "": None,
}
"""What a request says of its kind, as the proxy does and a prefill server's answer."""


class Recording(Playing):
    """Plays the workers that read from each other too."""

    def __init__(self, model, given):
        scheduler = connected(model, given, lambda *_: {"kv_connector": "NixlConnector"})
        super().__init__(given, scheduler, given["block_size"])
        self.looks, self.done, self.sent = [], [], []
        """What the real ones have decided since the last step: see the fields ``look``, ``done`` and ``sent``."""
        self.reads, self.sends = {}, {}
        """Of requests whose blocks are read here, or by others: the steps that it still takes."""
        connector = scheduler.connector.connector_scheduler
        find = connector.get_num_new_matched_tokens

        def tell_found(request, local, **options):
            found = find(request, local, **options)
            self.looks.append([request.request_id, local, found[0]])
            return found

        connector.get_num_new_matched_tokens = tell_found

    def header(self):
        """Every setting."""
        return super().header() | {"apart": True}

    def goes_on(self, record):
        """As long as something is read too."""
        return super().goes_on(record) or bool(self.reads or self.sends)

    def composed(self, output, emit):
        """What was looked for and what is to be read; the requests that have been read by then, here and by others."""
        meta, looks, self.looks = output.kv_connector_metadata, self.looks, []
        reads = {name: read for name, read in meta.reqs_to_recv.items() if read.awaiting_kvs}
        self.sends |= {name: self.draw.randrange(self.given["slowest"]) for name in meta.reqs_to_send}
        self.reads |= {name: self.draw.randrange(self.given["slowest"]) for name in reads}
        return {
            "look": looks,
            "reads": [[name, list(read.local_physical_block_ids[0])] for name, read in reads.items()],
            "hold": sorted(meta.reqs_to_send),
        }, (_ended(self.reads), _ended(self.sends))

    def told(self):
        """The requests that have been read."""
        told, self.done, self.sent = {"done": self.done, "sent": self.sent}, [], []
        return told

    def asked(self):
        """A prefill server answers with one token."""
        kind = self.draw.choice(["prefill", "decode", "decode", ""])
        return 1 if kind == "prefill" else self.draw.randrange(1, self.given["max_out"]), 0, kind

    def extra_of(self, kind=None):
        """What the proxy or the prefill server says."""
        return {} if KINDS[kind] is None else {"kv_transfer_params": dict(KINDS[kind])}

    def besides(self, kept):
        """The requests that have been read."""
        done, sent = kept
        self.done += done
        self.sent += sent
        said = KVConnectorOutput(finished_recving=dict.fromkeys(done), finished_sending=dict.fromkeys(sent))
        return {"kv_connector_output": said}


def _ended(under_way):
    """Let a step pass; the requests that have been read by then."""
    for name in under_way:
        under_way[name] -= 1
    ended = [name for name, left in under_way.items() if left < 0]
    for name in ended:
        del under_way[name]
    return ended


if __name__ == "__main__":
    main(Recording, SETTINGS)

"""An order of eviction of one's own: blocks that were used only once are forgotten first."""


class UsedTwice:
    """Blocks used once go before all others; among equals the one released longest ago goes first."""

    def __init__(self):
        self.used_again = set()

    def stored(self, block, key):
        """The block has become a cached one."""
        self.used_again.discard(block)

    def hit(self, block, key):
        """The block was found by a sequence."""
        self.used_again.add(block)

    def rank(self, block, key):
        """The lower, the sooner it is forgotten; asked for when the block is released."""
        return int(block in self.used_again)


EVICTIONS = {"used-twice": UsedTwice}

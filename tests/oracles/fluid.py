"""A step in small steps of time: bytes flow as far as they can in each, and compute starts when its layer fits.

Bytes for the disk go first, as far as host memory has room for them. Sizes and times come out right up to a few steps'
worth; nothing here is shared with the package but the data types.
"""

from math import inf


def step_time(chain, choice, limits, tick):
    """Milliseconds of a step whose compute times are multiples of `tick`; None where a limit is broken."""
    chosen = [layer.options[o] for layer, o in zip(chain.layers, choice, strict=True)]
    for name in ("host", "disk", "error"):
        if sum(getattr(option, name) for option in chosen) > getattr(limits, name):
            return None
    links = chain.links
    room = limits.host - sum(option.host for option in chosen)
    total = chain.rest
    for link, disk, way in ((links.out, links.disk_out, "forward"), (links.back, links.disk_back, "backward")):
        lane = Queues(disk if links.on_host else link, inf if links.on_host else disk, room, tick)
        held = 0.0
        for layer, option in zip(chain.layers, chosen, strict=True):
            need = held + getattr(option, way + "_peak")
            if need > limits.device:
                return None
            while need + lane.on_device > limits.device + 1e-9:
                lane.flow()
                total += tick
            time = getattr(layer, way) + getattr(option, way)
            for _ in range(round(time / tick)):
                lane.flow()
            total += time
            if links.on_host:
                lane.other += option.disk
            else:
                lane.other += option.link - option.disk
                lane.for_disk += option.disk
            held += option.held
        while lane.on_device + lane.staged > 1e-9:
            lane.flow()
            total += tick
    return total


class Queues:
    """Bytes on the device for host memory and for the disk, and bytes in host memory for the disk."""

    def __init__(self, link, disk, room, tick):
        self.link, self.disk, self.room = link * tick, disk * tick, room
        self.other = self.for_disk = self.staged = 0.0

    @property
    def on_device(self):
        return self.other + self.for_disk

    def flow(self):
        """One tick. The disk takes what was there before and what comes now."""
        first = min(self.for_disk, self.link)
        written = min(self.disk, self.staged + first)
        first = min(first, self.room - self.staged + written)
        self.for_disk -= first
        self.staged += first - written
        self.other -= min(self.other, self.link - first)

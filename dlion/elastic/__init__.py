"""Workers that are killed, come and go: `Elastic`, whose steps nobody applies unless all who survive do."""

from dlion.elastic.elastic import Elastic

__all__ = ["Elastic"]

"""`dlion plan`: seconds and bytes of a step on a cluster that need not exist, by a stated model."""

"""Lion's votes on an accelerator: a step that the host starts and never waits for.

t, learning rates, headers and what went wrong lie on the device, and every decision about them is taken there. The host
hears of a step when the next one begins. Bits are those of the path on the host.
"""

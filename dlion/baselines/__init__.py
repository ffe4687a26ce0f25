"""The methods that Distributed Lion is compared with, each written from its own paper."""

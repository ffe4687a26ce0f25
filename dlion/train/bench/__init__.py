"""`dlion bench`: whether voting pays on the user's own group of workers, measured."""

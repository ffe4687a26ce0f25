"""The application behind the command `dlion`: data, models, tasks, the training loop and its reports."""

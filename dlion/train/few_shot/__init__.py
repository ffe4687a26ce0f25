"""`dlion few-shot`: a language model on the seven tasks of the paper's Table 3, through the LM Evaluation Harness."""

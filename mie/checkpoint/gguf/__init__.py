"""Read a model from a GGUF file. It holds weights, configuration and tokenizer.

`header` reads the metadata and the list of tensors, `blocks` decodes numbers, and `weights` offers
them as a checkpoint. `config` and `tokenizer` translate the metadata to the files of a Hugging Face
model directory, so that the rest of mie reads both in one way.
"""

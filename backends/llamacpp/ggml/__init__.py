"""llama.cpp's library: its functions, callbacks, files and tensors."""

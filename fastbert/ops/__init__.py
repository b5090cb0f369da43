"""The fused ops. One module per op: schema, fake, device functions, autograd, public function."""

"""Other packages' doors to this one: `kda.integrations.fla` for flash-linear-attention."""

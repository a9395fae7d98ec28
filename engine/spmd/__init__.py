"""Worker groups without Ray: every process of one torch.distributed world hosts a rank of each role."""

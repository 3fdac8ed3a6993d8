"""Reading Dynamo's graph: its values and modes, its operators in ATen, its inputs, and its token axes."""

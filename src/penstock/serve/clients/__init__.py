"""What a program holds in its hand: a `Plane` for producers, a `Source` for a rank, and how to open them."""

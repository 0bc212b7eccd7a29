"""Where the members of a tree live on ranks, and how long a step takes there, before any rank is started."""

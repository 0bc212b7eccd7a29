"""What a step on ranks will take, worked out before any rank is started."""

"""Exchange between tiles: bytes each tile sends and receives, and pieces, without listing elements."""

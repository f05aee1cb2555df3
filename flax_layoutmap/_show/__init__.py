"""Tables and texts of resolved trees."""

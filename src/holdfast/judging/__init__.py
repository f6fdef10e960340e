"""What a model does: greedy replies, and judges that call each reply safe, unsafe or unscored."""

"""From a file, folder or hub name to tokenised rows that keep their `row_id`."""

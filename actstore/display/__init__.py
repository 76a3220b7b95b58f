"""Text, HTML and pictures. Pictures need matplotlib (the extra `bench`)."""

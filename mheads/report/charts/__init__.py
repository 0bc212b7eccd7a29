"""What each chart shows, as plain data: no file here knows how a chart is drawn."""

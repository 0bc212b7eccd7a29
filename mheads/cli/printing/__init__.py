"""Tables, trees and plans as the terminal shows them."""

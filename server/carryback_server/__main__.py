from carryback_server.cli import main

main()

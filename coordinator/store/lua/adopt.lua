-- ARGV: lease_ms, request ids. Those that live and have no lease get one, which their gateway renews if it has them.
for i = 2, #ARGV do
  local state = redis.call('HGET', key('req:', ARGV[i]), 'state')
  if state and not ENDS[state] then redis.call('ZADD', key('leases'), 'NX', NOW_MS + ARGV[1], ARGV[i]) end
end
return 1

-- ARGV: lease_ms, request ids. Returns how many leases were renewed: what has ended has none.
local until_ms, found = NOW_MS + tonumber(ARGV[1]), 0
for i = 2, #ARGV do
  if redis.call('ZSCORE', key('leases'), ARGV[i]) then
    redis.call('ZADD', key('leases'), until_ms, ARGV[i])
    found = found + 1
  end
end
return found

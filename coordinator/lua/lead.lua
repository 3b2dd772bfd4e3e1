-- ARGV: holder, lease_ms. Returns 1 for the leader.
local holder = redis.call('GET', key('leader'))
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', key('leader'), ARGV[1], 'PX', ARGV[2])
return 1

-- ARGV: holder, lease_ms. Returns 0 while another leads, 1 for who leads from now on, 2 for who did already.
local holder = redis.call('GET', key('leader'))
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', key('leader'), ARGV[1], 'PX', ARGV[2])
return holder and 2 or 1
